"""The far side of :mod:`gymrl.environments.builtin.python_sandbox`: a script of its own.

It is started as ``python -I -S -B sandbox_launcher.py STATUS_FD``, imports the standard library
alone, and runs one program::

    launcher (this script) ── init (pid 1 of the program's own pid namespace) ── the program

Its stdin carries the job, and stays open afterwards: its end means that whoever asked is gone. The
launcher ends only when the program and everything the program started have ended. What became of
it goes to STATUS_FD as one JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
SYS_MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY, AT_FDCWD = 442, 0x8000, 1, -100
FIRST_SANDBOX_UID = 1_900_000_000

# Landlock, by the version of its interface: what a program without namespaces may not do.
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
WRITE_FILE = 1 << 1
CHANGE_DIRECTORIES = sum(1 << bit for bit in range(4, 13))  # remove and make files of all kinds
REFER, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
BIND_AND_CONNECT_TCP = 3
ABSTRACT_SOCKETS_AND_SIGNALS = 3

# Without namespaces: what a program may not ask its interpreter for. Native code can get around it.
_REFUSED = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.kill",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.startfile",
    "pty.",
)
_GUARD = f"""
import runpy, signal, sys
vars(signal).pop("pidfd_send_signal", None)
vars(sys.modules["_signal"]).pop("pidfd_send_signal", None)
def _guard(event, arguments, refused={_REFUSED!r}):
    if event.startswith(refused):
        raise PermissionError(f"{{event}} is not allowed in the sandbox")
    if event == "ctypes.dlopen" and arguments[0] is not None:
        raise PermissionError("loading native libraries is not allowed in the sandbox")
    if event == "ctypes.dlsym":
        raise PermissionError("native calls are not allowed in the sandbox")
sys.addaudithook(_guard)
del _guard
sys.argv = ["main.py"]
runpy.run_path("main.py", run_name="__main__")
"""


def check(result: int) -> None:
    """Raise the error of a C call that returned -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system; `flags` are the kernel's."""
    check(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        )
    )


def main() -> None:
    """Read the job, run it, report."""
    status_fd = int(sys.argv[1])
    os.set_inheritable(status_fd, False)
    header = read_exactly(0, 8)
    job = json.loads(read_exactly(0, struct.unpack(">Q", header)[0]))
    check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    report: dict[str, Any] = {}
    try:
        report["isolation"] = isolate(job["isolation"])
        report |= supervise(job, report["isolation"])
    except OSError as error:
        report["refused"] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, json.dumps(report).encode())


def read_exactly(fd: int, count: int) -> bytes:
    """`count` bytes of a pipe; ends the process when whoever asked is gone."""
    chunks = b""
    while len(chunks) < count:
        chunk = os.read(fd, count - len(chunks))
        if not chunk:
            sys.exit(1)
        chunks += chunk
    return chunks


def isolate(wanted: str) -> str:
    """Enter namespaces of our own; returns ``namespaces``, ``user_namespaces`` or ``process``."""
    if wanted == "process":
        return "process"
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS
    uid, gid = os.getuid(), os.getgid()
    try:
        check(_libc.unshare(flags))
        return "namespaces"
    except OSError:
        pass
    try:
        check(_libc.unshare(flags | CLONE_NEWUSER))
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
        return "user_namespaces"
    except OSError:
        if wanted == "namespaces":
            raise
    return "process"


def write(path: str, text: str) -> None:
    """Write a small file of the kernel's."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def supervise(job: dict[str, Any], isolation: str) -> dict[str, Any]:
    """Start the program, wait for its end, the time limit or the end of whoever asked."""
    report_r, report_w = os.pipe()
    alive_r, alive_w = os.pipe()
    started = time.monotonic()
    init = os.fork()
    if init == 0:
        os.close(report_r)
        os.close(alive_w)
        run_init(job, isolation, report_w, alive_r)
    os.close(report_w)
    os.close(alive_r)
    ready, _, _ = select.select([report_r, 0], [], [], job["wall_time_s"])
    report: dict[str, Any] = {"outcome": "timeout"}
    if report_r in ready:
        text = os.read(report_r, 65536)
        report = json.loads(text) if text else {"outcome": "killed"}
    elif 0 in ready:
        report = {"outcome": "cancelled"}
    os.kill(init, signal.SIGKILL)
    end_everything(isolation)
    return {**report, "wall_time_s": time.monotonic() - started}


def end_everything(isolation: str) -> None:
    """Reap every process below this one; without a pid namespace, kill them first.

    This process is the subreaper, so a program's children come to it when their parents end,
    those that left their session too.
    """
    while True:
        if isolation == "process":
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name in brackets may hold anything; what follows the last one are numbers.
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def run_init(job: dict[str, Any], isolation: str, report_w: int, alive_r: int) -> NoReturn:
    """The first process of the namespaces: prepares them, starts the program and reaps."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([alive_r], [], [], 0)[0]:
        os._exit(1)
    uid = None
    try:
        if isolation == "namespaces":
            uid = FIRST_SANDBOX_UID + os.stat("/proc/self/ns/pid").st_ino % 100_000_000
        is_counted = isolation != "process" and prepare_mounts(job, uid)
        stdin = os.memfd_create("stdin")
        os.write(stdin, job["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        script = os.path.join(job["directory"], "main.py")
        with open(script, "w", encoding="utf-8", errors="replace") as file:
            file.write(job["code"])
        program = os.fork()
    except OSError as error:
        os.write(report_w, json.dumps({"refused": f"preparing the sandbox: {error}"}).encode())
        os._exit(1)
    if program == 0:
        run_program(job, isolation, uid, stdin)
    # The kernel lets root have as many processes as it likes, so they are counted here.
    limit = job["max_processes"] if is_counted and uid is None and os.getuid() == 0 else None
    waited = wait_for(program, limit)
    if waited is None:
        os.write(report_w, json.dumps({"outcome": "process_limit"}).encode())
        os._exit(0)
    status, used = waited
    report = {
        "outcome": "exited",
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "cpu_time_s": used.ru_utime + used.ru_stime,
        "max_memory_bytes": used.ru_maxrss * 1024,
    }
    os.write(report_w, json.dumps(report).encode())
    os._exit(0)


def wait_for(program: int, max_processes: int | None) -> tuple[int, resource.struct_rusage] | None:
    """The program's status and usage; None when there were more processes than allowed."""
    while True:
        pid, status, used = os.wait4(-1, 0 if max_processes is None else os.WNOHANG)
        if pid == program:
            return status, used
        if pid == 0 and max_processes is not None:
            if sum(name.isdigit() for name in os.listdir("/proc")) - 1 > max_processes:
                return None
            time.sleep(0.01)


def prepare_mounts(job: dict[str, Any], uid: int | None) -> bool:
    """Everything read-only, shared scratch space hidden, a small working directory of its own.

    Returns:
        Whether ``/proc`` shows this pid namespace alone.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    check(
        _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes))
    )
    keep = [path for path in job["keep"] if os.path.isdir(path)]
    hidden = {path for path in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(path)}
    if uid is not None:
        # The program is a stranger here: it must still reach its interpreter.
        hidden |= {door for path in keep if (door := closed_door(path))}
    for path in sorted(hidden):
        hide(path, [kept for kept in keep if kept.startswith(path + "/")])
    directory = job["directory"]
    os.makedirs(directory, exist_ok=True)
    size, owner = job["disk_bytes"], os.getuid() if uid is None else uid
    mount(
        "tmpfs",
        directory,
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"size={size},nr_inodes=4096,mode=700,uid={owner}",
    )
    # Other processes are none of the program's business; some containers forbid a new /proc.
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:
        return False
    return True


def closed_door(path: str) -> str | None:
    """The first directory on the way to `path` that strangers may not enter."""
    parts = os.path.realpath(path).split("/")[1:]
    for count in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:count])
        if not os.stat(place).st_mode & stat.S_IXOTH:
            return place
    return None


def hide(path: str, keep: list[str]) -> None:
    """Put an empty directory over `path`, with the directories of `keep` in their places."""
    opened = [(kept, os.open(kept, os.O_PATH | os.O_DIRECTORY)) for kept in sorted(keep)]
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
    for kept, fd in opened:
        os.makedirs(kept, exist_ok=True)
        mount(f"/proc/self/fd/{fd}", kept, None, MS_BIND | MS_REC)
        os.close(fd)


def run_program(job: dict[str, Any], isolation: str, uid: int | None, stdin: int) -> NoReturn:
    """Become the program."""
    try:
        os.setsid()
        os.chdir(job["directory"])
        os.dup2(stdin, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        limit(job, isolation)
        for capability in range(64):
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if isolation == "process":
            confine(job["directory"])
        program = ["-c", _GUARD] if isolation == "process" else ["main.py"]
        environment = {**job["environment"], "HOME": job["directory"], "TMPDIR": job["directory"]}
        os.execve(job["python"], [job["python"], "-I", "-B", *program], environment)
    except OSError as error:
        os.write(2, f"the sandbox could not start the program: {error}\n".encode())
    os._exit(126)


def confine(directory: str) -> None:
    """Let the kernel refuse writes outside `directory`, TCP and signals, as far as it knows how.

    Landlock needs no privilege, only Linux from 5.13 on; TCP came with 6.7, signals with 6.12.
    """
    version = _libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
    if version < 1:
        return
    of_files = WRITE_FILE
    of_files |= (TRUNCATE if version >= 3 else 0) | (IOCTL_DEVICE if version >= 5 else 0)
    writes = of_files | CHANGE_DIRECTORIES | (REFER if version >= 2 else 0)
    attributes = struct.pack("Q", writes)
    attributes += struct.pack("Q", BIND_AND_CONNECT_TCP) if version >= 4 else b""
    attributes += struct.pack("Q", ABSTRACT_SOCKETS_AND_SIGNALS) if version >= 6 else b""
    size = ctypes.c_size_t(len(attributes))
    rules = _libc.syscall(SYS_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    check(rules)
    for path, allowed in ((directory, writes), ("/dev/null", of_files)):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, place)
        check(_libc.syscall(SYS_LANDLOCK_ADD_RULE, rules, LANDLOCK_PATH_BENEATH, rule, 0))
        os.close(place)
    check(_libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, rules, 0))
    os.close(rules)


def limit(job: dict[str, Any], isolation: str) -> None:
    """Set the kernel's limits for the program and what it starts."""
    cpu = max(1, int(job["cpu_time_s"]))
    processes = job["max_processes"]
    if isolation == "user_namespaces":
        processes += 1  # init has the same user
    limits = {
        resource.RLIMIT_AS: (job["memory_bytes"],) * 2,
        resource.RLIMIT_FSIZE: (job["file_bytes"],) * 2,
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_NOFILE: (job["max_open_files"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    if isolation != "process":
        # Without namespaces it would count all that the user runs; there, forking is refused.
        limits[resource.RLIMIT_NPROC] = (processes,) * 2
    for kind, values in limits.items():
        resource.setrlimit(kind, values)


if __name__ == "__main__":
    main()

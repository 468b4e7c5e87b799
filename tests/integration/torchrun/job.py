"""What the tests of this folder launch: one job, and one way in which it may go."""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import gymrl.torchrun
from benchmarks.nodes.latency import latency_config, latency_rows, policy_server
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.errors import OutputError
from gymrl.generation.weight_transfer import whole
from gymrl.torchrun import PerNode, TorchrunConfig
from gymrl.torchrun.weights import named_tensors

torch.set_num_threads(1)

LAST_ACTS = []
"""What is done when a rank has said its error."""

# Found silent only where a test is about it: a busy machine may stop a process for seconds.
HEARTBEAT_S = float(os.environ.get("HEARTBEAT_S", "60"))


def say(**facts):
    # One write: lines of two ranks share a pipe.
    os.write(1, (json.dumps(facts) + "\n").encode())


def config(**settings):
    return TorchrunConfig(
        rollout=latency_config(POLICY, latency_s=0.05, tokens=16, seed=1, **settings),
        heartbeat_timeout_s=HEARTBEAT_S,
        per_node=PerNode(gym_workers=int(os.environ.get("GYM_WORKERS", "1"))),
    )


def facts(share):
    return {
        "groups": [group.index for group in share.groups],
        "samples": [len(group.samples) for group in share.groups],
        "tokens": [int(t.token_ids.sum()) for g in share.groups for t in g.trajectories],
        "reward_mean": share.metrics["reward_mean"],
        "pids": sorted({json.loads(t.result)["pid"] for g in share.groups for t in g.trajectories}),
    }


def collect():
    with gymrl.torchrun.rollouts(config(), rows=latency_rows(6, reward=0.25)) as rollouts:
        for _ in range(2):
            share = rollouts.collect(rollouts.take(5), num_generations=2)
            say(rank=rollouts.rank, size=rollouts.world_size, **facts(share))
        say(rank=rollouts.rank, state=rollouts.state_dict())


def stream():
    with gymrl.torchrun.rollouts(config(), rows=latency_rows(6)) as rollouts:
        model = torch.nn.Linear(2, 2)
        for number, share in enumerate(
            rollouts.stream(num_generations=2, groups_per_step=4, max_staleness=1)
        ):
            say(rank=rollouts.rank, staleness=share.staleness, **facts(share))
            rollouts.update_weights(model)
            if number == 3:
                break
        say(rank=rollouts.rank, state=rollouts.state_dict())


def two_streams():
    rows = [row for reward in range(12) for row in latency_rows(1, reward=reward)]
    with gymrl.torchrun.rollouts(config(), rows=rows, shuffle=False) as rollouts:
        first = rollouts.stream(num_generations=1, groups_per_step=2, max_staleness=2)
        shares = [next(first)]
        second = rollouts.stream(num_generations=1, groups_per_step=2, max_staleness=0)
        shares += [next(second), next(second)]
        try:
            next(first)
        except RuntimeError as error:
            say(rank=0, refused=str(error))
        shares += [next(second)]
        trajectories = [t for share in shares for g in share.groups for t in g.trajectories]
        say(rank=0, rewards=sorted(t.reward.verifier for t in trajectories))


def all_dropped():
    # Replies without a token are failures of their rows.
    settings = latency_config(
        POLICY, latency_s=0.05, tokens=0, failure_policy="drop_group", max_data_attempts=1
    )
    with gymrl.torchrun.rollouts(settings, rows=latency_rows(6)) as rollouts:
        next(rollouts.stream(num_generations=1, groups_per_step=2, max_staleness=1))


def existing_group():
    torch.distributed.init_process_group("gloo")
    collect()
    torch.distributed.barrier()
    say(rank=torch.distributed.get_rank(), group="still there")
    torch.distributed.destroy_process_group()


def body_raises():
    with gymrl.torchrun.rollouts(config()) as rollouts:
        rollouts.collect(latency_rows(2))
        if rollouts.rank == 1:
            raise KeyError("the trainer's own")
        rollouts.collect(latency_rows(2))
        rollouts.update_weights(torch.nn.Linear(1, 1))


def other_settings():
    own = config()
    if os.environ["RANK"] == "1":
        own = TorchrunConfig(rollout=own.rollout, per_node=PerNode(gym_workers=3))
    with gymrl.torchrun.rollouts(own) as rollouts:
        rollouts.collect(latency_rows(2))


def collective_waits():
    with gymrl.torchrun.rollouts(config()) as rollouts:
        rollouts.collect(latency_rows(2))
        if rollouts.rank == 1:
            raise KeyError("the trainer's own")
        torch.distributed.all_reduce(torch.ones(1))


def engine_fails():
    with gymrl.torchrun.rollouts(config(max_data_attempts=1)) as rollouts:
        rows = latency_rows(2)
        rows[1]["task_source"] = "nowhere"
        rollouts.collect(rows)


def worker_dies():
    with gymrl.torchrun.rollouts(config(worker_restarts=0)) as rollouts:
        rows = latency_rows(4)
        row = int(os.environ.get("DIE_ROW", "2"))
        rows[row]["responses_create_params"]["input"][0]["content"] = "die"
        rollouts.collect(rows)


def poison_row():
    with gymrl.torchrun.rollouts(config(worker_restarts=8, failure_policy="mask")) as rollouts:
        rows = latency_rows(4)
        rows[1]["responses_create_params"]["input"][0]["content"] = "die"
        share = rollouts.collect(rows)
        failed = [f.error for group in share.groups for f in group.failures]
        say(rank=rollouts.rank, failed=failed, metrics=share.metrics)
        share = rollouts.collect(latency_rows(4))
        say(rank=rollouts.rank, **facts(share))


def step():
    """What a step learns when ranks have uneven shares, against one process with all of them."""
    from gymrl.recipes.grpo import _resume
    from tests.unit.recipes.steps import GROUPS, settings
    from tests.unit.recipes.steps import step as step_of

    alone, numbers = step_of(GROUPS, settings(micro_batch_tokens=20))
    expected = dict(alone.model.named_parameters())
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for parallel in ("ddp", "fsdp2"):
        for shares in (([0, 2], [1]), ([0, 1, 2], [])):
            own = [GROUPS[index] for index in shares[rank]]
            trainer, found = step_of(own, settings(parallel=parallel, micro_batch_tokens=16))
            ours = named_tensors(trainer.model)
            gaps = [(whole(ours[name]) - p.detach()).abs().max() for name, p in expected.items()]
            say(
                rank=rank,
                parallel=parallel,
                gap=float(max(gaps)),
                numbers={name: found[name] - numbers[name] for name in numbers},
            )
    # As where each node has a directory of its own.
    (Path(sys.argv[2]) / str(rank)).mkdir()
    (Path(sys.argv[2]) / str(rank) / f"step_0000000{rank + 1}.pt").touch()
    try:
        _resume(settings(output=f"{sys.argv[2]}/{rank}"), trainer, None)
    except OutputError as error:
        say(rank=rank, refused=str(error))
    torch.distributed.destroy_process_group()


def rank_stuck():
    from torch.distributed.fsdp import fully_shard

    with gymrl.torchrun.rollouts(config()) as rollouts:
        sharded = fully_shard(torch.nn.Linear(4, 4))
        rollouts.collect(latency_rows(2))
        stopped = torch.tensor(os.getpid() * rollouts.rank)
        torch.distributed.all_reduce(stopped)
        if rollouts.rank == 0:
            # The launcher would give it half a minute to end by itself.
            LAST_ACTS.append(lambda: os.kill(int(stopped), signal.SIGKILL))
        if rollouts.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        rollouts.update_weights(sharded)


def launcher_killed():
    with gymrl.torchrun.rollouts(config()) as rollouts:
        rollouts.collect(latency_rows(2))
        if rollouts.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        while True:
            rollouts.collect(latency_rows(2))


def stream_body_raises():
    with gymrl.torchrun.rollouts(config(), rows=latency_rows(6)) as rollouts:
        for _ in rollouts.stream(num_generations=2, groups_per_step=4, max_staleness=3):
            raise KeyError("the trainer's own")


def late():
    slow = TorchrunConfig(rollout=latency_config(POLICY, latency_s=60), collect_timeout_s=1.5)
    with gymrl.torchrun.rollouts(slow) as rollouts:
        rollouts.collect(latency_rows(2))


def endless():
    with gymrl.torchrun.rollouts(config(worker_restarts=0)) as rollouts:
        for number in range(100_000):
            share = rollouts.collect(latency_rows(8), num_generations=2)
            if number in (0, 3):
                say(rank=rollouts.rank, ready=number, **facts(share))
            rollouts.update_weights(torch.nn.Linear(1, 1))


def idle():
    with gymrl.torchrun.rollouts(config()) as rollouts:
        rows = latency_rows(2)
        rollouts.collect(rows)
        began, used = time.monotonic(), time.process_time()
        if rollouts.rank == 0:
            time.sleep(3)
        rollouts.collect(rows)
        busy = (time.process_time() - used) / (time.monotonic() - began)
        say(rank=rollouts.rank, busy=busy)


def word_model():
    from gymrl.recipes.say_word import say_word_rows, say_word_servers
    from gymrl.torchrun.weights import whole_parameters

    directory = sys.argv[2]
    model = _load(directory, sharded=os.environ.get("WORLD_SIZE", "1") != "1")
    rollout = RolloutConfig(
        generation=GenerationConfig(model=directory, num_threads=1, max_model_len=64),
        gym=GymConfig(servers=say_word_servers(), decode_text=False),
        sampling=SamplingParams(max_tokens=3),
        seed=2,
        worker_restarts=2,
    )
    with gymrl.torchrun.rollouts(rollout, rows=say_word_rows()) as rollouts:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        for kill in (False, True):
            rollouts.update_weights(model)
            if kill and rollouts.rank == 0:
                _kill_generators(rollouts)
            share = rollouts.collect(rollouts.take(4), num_generations=2)
            whole = whole_parameters(model, keep=True)
            gap = max(_gap(directory, whole, t) for g in share.groups for t in g.trajectories)
            engine = rollouts._here.engine
            names = [] if engine is None else [i.name for i in engine.fleet.instances]
            facts = {"gap": gap, "version": rollouts.version, "workers": names}
            say(rank=rollouts.rank, killed=kill, **facts)


def ages():
    """Updates arrive while groups are generated; every log-probability must be its version's."""
    from gymrl.recipes.say_word import say_word_rows, say_word_servers
    from gymrl.torchrun.weights import whole_parameters

    directory = sys.argv[2]
    model = _load(directory, sharded=False)
    rollout = RolloutConfig(
        generation=GenerationConfig(model=directory, num_threads=1, max_batch_size=64),
        gym=GymConfig(servers=say_word_servers(), decode_text=False, token_source="both"),
        sampling=SamplingParams(max_tokens=150),
        seed=2,
    )
    with gymrl.torchrun.rollouts(rollout, rows=say_word_rows()) as rollouts:
        known = [whole_parameters(model, keep=True)]
        for share in rollouts.stream(num_generations=8, groups_per_step=4, max_staleness=1):
            trajectories = [t for group in share.groups for t in group.trajectories]
            ages = share.token_ages(share.batch(pad_token_id=0))
            numbers = [len({s.version for s in t.weight_versions}) for t in trajectories]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1 if rollouts.version % 2 else 0.9)
            known.append(whole_parameters(model, keep=True))
            # While the next step's groups are generated.
            rollouts.update_weights(model)
            say(
                rank=rollouts.rank,
                numbers=numbers,
                oldest=int(ages.max()),
                metrics=share.metrics,
                gap=max(_gap_by_version(directory, known, t) for t in trajectories[::8]),
            )
            if rollouts.version == 40 or (rollouts.version > 3 and max(numbers) == 2):
                break


def transfer():
    """The trainer sends to vLLM engines: sharded, then replicated; then an engine dies."""
    from gymrl.config import VllmConfig
    from gymrl.recipes.say_word import say_word_rows, say_word_servers
    from gymrl.torchrun.handover import gather_shown
    from gymrl.torchrun.weights import whole_parameters

    directory = sys.argv[2]
    sharded = _load(directory, sharded=True)
    replicated = torch.nn.parallel.DistributedDataParallel(_load(directory, sharded=False))
    generation = GenerationConfig(
        model=directory,
        backend="vllm",
        vllm=VllmConfig(kv_cache_bytes=16 << 20),
        num_threads=1,
        max_model_len=64,
    )
    job = TorchrunConfig(
        rollout=RolloutConfig(
            generation=generation,
            gym=GymConfig(servers=say_word_servers(), decode_text=False),
            sampling=SamplingParams(max_tokens=3),
            seed=2,
        ),
        per_node=PerNode(generators=2, gym_workers=2),
        weight_transfer="gloo",
    )
    with gymrl.torchrun.rollouts(job, rows=say_word_rows()) as rollouts:
        both = gather_shown(rollouts._open_world, _shown(rollouts.rank), "shown", 60)
        say(rank=rollouts.rank, shown=both and both.update_info["handles"])
        for model, factor in ((sharded, 1.5), (replicated, 0.7)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            rollouts.update_weights(model)
            share = rollouts.collect(rollouts.take(4), num_generations=2)
            whole = whole_parameters(model, keep=True)
            gap = max(_gap(directory, whole, t) for g in share.groups for t in g.trajectories)
            say(rank=rollouts.rank, version=rollouts.version, gap=gap)
        if rollouts.rank == 0:
            _kill_generators(rollouts)
        rollouts.collect(rollouts.take(4), num_generations=2)


def _shown(rank):
    """What a rank with a GPU of its own would show of a model of one tensor."""
    from gymrl.generation.cuda_handles import CudaHandle, to_plain
    from gymrl.generation.weights import IPC_BACKEND, TransferWeights

    handle = CudaHandle(
        tensor_size=(2, 3),
        tensor_stride=(3, 1),
        tensor_offset=0,
        dtype="bfloat16",
        storage_device=rank,
        storage_handle=bytes([255, rank]),
        storage_size_bytes=12,
        storage_offset_bytes=0,
        ref_counter_handle=b"/counter",
        ref_counter_offset=0,
        event_handle=b"",
        event_sync_required=False,
    )
    tensors = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    handles = to_plain([{f"GPU-{rank}": handle}])
    info = {**tensors, "handles": handles}
    return TransferWeights(backend=IPC_BACKEND, init_info={}, update_info=info)


def _gap_by_version(directory, known, trajectory):
    mask, versions = trajectory.token_mask(), trajectory.token_versions()
    assert (versions[mask] >= 0).all()
    return max(
        _gap(directory, known[version], trajectory, mask & (versions == version))
        for version in sorted(set(versions[mask].tolist()))
    )


def _kill_generators(rollouts):
    engine = rollouts._here.engine
    for instance in engine.fleet.instances:
        if instance.name.startswith("generator 0/"):  # of this node
            os.kill(instance.pid, signal.SIGKILL)


def _load(directory, *, sharded):
    import transformers
    from torch.distributed.fsdp import fully_shard

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    if sharded:
        torch.distributed.init_process_group("gloo")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


@functools.cache
def _reference(directory):
    return _load(directory, sharded=False)


def _gap(directory, whole, trajectory, mask=None):
    model = _reference(directory)
    model.load_state_dict(whole)
    ids = torch.from_numpy(trajectory.token_ids.astype("int64"))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(-1, ids[1:, None])[:, 0]
    mask = torch.from_numpy(trajectory.token_mask() if mask is None else mask)[1:]
    theirs = torch.from_numpy(trajectory.logprobs.copy())[1:]
    return float((own - theirs)[mask].abs().max())


def hear_the_others():
    """The launcher ends the other ranks with the first that fails: wait until all have spoken."""
    if "SPOKEN" not in os.environ:
        return
    directory = Path(os.environ["SPOKEN"])
    (directory / os.environ["RANK"]).touch()
    ends = time.monotonic() + 60
    while len(list(directory.iterdir())) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > ends:
            break
        time.sleep(0.05)


def run(name):
    try:
        globals()[name]()
    except BaseException as error:
        cause = error.__cause__
        say(
            rank=int(os.environ.get("RANK", "0")),
            error=type(error).__name__,
            text=str(error),
            cause=type(cause).__name__,
            cause_text=str(cause),
        )
        hear_the_others()
        for act in LAST_ACTS:
            act()
        raise


if __name__ == "__main__":
    with policy_server(os.environ.get("OWN_ADDRESS", "127.0.0.1")) as POLICY:
        run(sys.argv[1])

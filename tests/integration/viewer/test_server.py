"""What the viewer's server answers, and whom."""

import asyncio
import json

import aiohttp
import anyio
import pytest

from gymrl.errors import ConfigError
from gymrl.viewer import ViewerOptions, open_viewer
from tests.evaluation_files import add_rows, plan_of
from tests.integration.viewer.sample import HOSTILE, TOKENIZER, png
from tests.rollout_files import failure, trajectory, write_rollouts


class Client:
    """GETs against one viewer."""

    def __init__(self, session, url):
        self.session = session
        self.base = url.split("/?")[0].rstrip("/")

    async def get(self, path, status=200, **options):
        async with self.session.get(self.base + path, **options) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def raw(self, path, method="GET", **options):
        async with self.session.request(
            method, self.base + path, allow_redirects=False, **options
        ) as response:
            return response.status, dict(response.headers), await response.read()


@pytest.fixture
async def client(viewer):
    async with aiohttp.ClientSession() as session:
        yield Client(session, viewer.url)


async def until(ask):
    with anyio.fail_after(20):
        while True:
            found = await ask()
            if found:
                return found
            await asyncio.sleep(0.02)


async def test_the_state_of_the_reading_and_the_names_for_filters(client):
    async def whole():
        status = await client.get("/api/status")
        return status if status["progress"]["state"] == "following" else None

    status = await until(whole)
    assert (status["rows"], status["groups"], status["broken"], status["runs"]) == (7, 4, 0, 1)
    assert status["agents"] == ["math_agent", "solver", HOSTILE]
    assert status["failures"] == ["infra: RolloutTimeout", f"infra: {HOSTILE}"]
    assert status["progress"]["indexed"] == status["progress"]["size"]


async def test_lists_are_filtered_sorted_and_cut(client):
    groups = await client.get("/api/groups?sort=-mean&limit=2")
    assert groups["total"] == 4
    assert [group["group"] for group in groups["groups"]] == [2, 3]
    rows = await client.get("/api/rows?failure=any")
    assert [row["line"] for row in rows["rows"]] == [5, 7]
    found = await client.get("/api/rows?q=call_7")
    assert ([row["line"] for row in found["rows"]], found["cursor"]) == ([2], None)


async def test_a_row_comes_without_its_arrays_and_those_in_spans(client):
    answer = await client.get("/api/rows/2")
    assert answer["row"]["total"] == 0.5
    assert [step["rule"] for step in answer["row"]["ledger"]] == ["verifier", "effort"]
    assert "token_ids" not in json.dumps(answer)
    assert [row["line"] for row in answer["group"]["rows"]] == [2, 3]
    assert (answer["previous_group"], answer["next_group"]) == (None, 4)

    span = await client.get("/api/rows/2/tokens?start=3&end=6")
    assert (span["start"], span["ids"], span["texts"]) == (3, [13, 14, 15], None)
    side = await client.get("/api/rows/2/tokens?start=0&end=99&sequence=1")
    assert side["ids"] == [40, 41, 42]


async def test_a_comparison_says_where_two_rows_part(client):
    answer = await client.get("/api/compare/2/3")
    assert (answer["first_difference"], answer["identical"]) == (4, False)
    assert answer["group"]["group"] == 0
    assert (await client.get("/api/compare/2/2"))["identical"] is True
    across = await client.get("/api/compare/2/5")
    assert (across["group"], across["first_difference"], across["identical"]) == (None, None, False)


async def test_the_raw_json_comes_level_by_level_and_the_line_whole(client, sample):
    node = await client.get('/api/rows/2/raw?path=["trajectory","token_ids"]')
    assert [entry["preview"] for entry in node["entries"]][:3] == ["10", "11", "12"]
    _, headers, body = await client.raw("/api/rows/2/line")
    assert body == sample.read_bytes().splitlines(keepends=True)[1]
    assert headers["Content-Disposition"] == 'attachment; filename="line-2.json"'


async def test_an_image_of_a_row_is_served_as_what_its_bytes_are(client):
    status, headers, body = await client.raw("/api/rows/8/images/0")
    assert (status, headers["Content-Type"], body) == (200, "image/png", png())
    assert "no image 1" in (await client.get("/api/rows/8/images/1", status=404))["error"]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/rows/1", 404, "line 1 is no row"),
        ("/api/rows/99999999999999999999", 404, "is no row"),
        ("/api/rows/" + "9" * 5000, 404, "no line 999"),
        ("/api/compare/2/" + "9" * 5000, 404, "no right 999"),
        ("/api/groups/77", 404, "no group 77"),
        ("/api/groups?sort=colour", 400, "sort=colour"),
        ("/api/groups?colour=red", 400, "colour"),
        ("/api/rows?limit=100000", 400, "limit"),
        ("/api/rows/2/tokens?start=x", 400, "start=x"),
        ("/api/rows/2/tokens?start=0&end=5000", 404, "at most 4096"),
        ("/api/rows/5/tokens?start=0&end=5", 404, "no sequence"),
        ("/api/rows/2/raw?path=[1]", 404, "nothing at"),
    ],
)
async def test_what_is_not_there_is_an_answer_that_says_so(client, path, status, said):
    assert said in (await client.get(path, status=status))["error"]


async def test_every_answer_keeps_the_page_to_itself(client):
    for path in ("/", "/static/main.js", "/api/status", "/api/rows/99", "/nowhere"):
        _, headers, _ = await client.raw(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "", "localhost:1"]
)
async def test_a_name_that_was_made_to_point_here_is_refused(client, host):
    port = client.base.rpartition(":")[2]
    status, _, body = await client.raw("/api/status", headers={"Host": host.format(port=port)})
    assert status in (400, 421)
    assert b"rows" not in body


async def test_the_names_of_this_machine_are_taken(client):
    port = client.base.rpartition(":")[2]
    for host in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]"):
        status, _, _ = await client.raw("/api/status", headers={"Host": f"{host}:{port}"})
        assert status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_the_viewer_only_shows(client, method):
    assert (await client.raw("/api/status", method))[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/index.html",
        "/static//etc/passwd",
        "/static/__init__.py",
    ],
)
async def test_no_other_file_can_be_had(client, path):
    status, _, body = await client.raw(path)
    assert status == 404
    assert b"import" not in body


async def test_a_token_opens_the_page_once_and_leaves_the_address(sample):
    options = ViewerOptions(token="s3cret-token")
    async with open_viewer(sample, options) as viewer, aiohttp.ClientSession() as session:
        client = Client(session, viewer.url)
        assert viewer.url.endswith("/?token=s3cret-token")
        assert (await client.raw("/api/status"))[0] == 403
        assert (await client.raw("/?token=s3cret-tokem"))[0] == 403

        status, headers, _ = await client.raw("/row/2?tab=raw&token=s3cret-token")
        assert (status, headers["Location"]) == (303, "/row/2?tab=raw")
        assert "HttpOnly" in headers["Set-Cookie"]
        assert "SameSite=Lax" in headers["Set-Cookie"]
        port = viewer.url.split(":")[2].split("/")[0]
        assert headers["Set-Cookie"].startswith(f"gymrl_viewer_{port}=")
        cookie = headers["Set-Cookie"].split(";")[0]
        other = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        async with other:
            again = Client(other, viewer.url)
            assert (await again.raw("/api/status", headers={"Cookie": cookie}))[0] == 200
            assert (await again.raw("/api/status"))[0] == 403


async def test_localhost_is_one_address(sample):
    options = ViewerOptions(host="localhost")
    async with open_viewer(sample, options) as viewer, aiohttp.ClientSession() as session:
        assert viewer.url.startswith("http://localhost:")
        assert (await Client(session, viewer.url).raw("/api/status"))[0] == 200
        numbers = viewer.url.replace("localhost", "127.0.0.1")
        assert (await Client(session, numbers).raw("/api/status"))[0] == 200


async def test_beyond_loopback_a_token_is_required(sample):
    with pytest.raises(ConfigError, match="--token"):
        async with open_viewer(sample, ViewerOptions(host="0.0.0.0")):
            pass


async def test_a_port_that_is_taken_is_named(sample, viewer):
    port = int(viewer.url.rsplit(":", 1)[1].rstrip("/"))
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        async with open_viewer(sample, ViewerOptions(port=port)):
            pass


async def test_with_a_tokenizer_tokens_have_texts(sample):
    options = ViewerOptions(tokenizer=TOKENIZER)
    async with open_viewer(sample, options) as viewer, aiohttp.ClientSession() as session:
        span = await Client(session, viewer.url).get("/api/rows/2/tokens?start=0&end=8")
    assert len(span["texts"]) == 8
    assert all(isinstance(text, str) for text in span["texts"])


async def test_rows_are_served_while_the_file_grows_and_after_it_was_replaced(
    client, sample, tmp_path
):
    async def rows():
        return (await client.get("/api/status"))["rows"]

    async def has(number):
        return await rows() == number

    write_rollouts(sample, [trajectory()], append=True, first=9)
    await until(lambda: has(8))
    assert (await client.get("/api/rows/9"))["row"]["total"] == 1.0

    write_rollouts(tmp_path / "other.jsonl", [failure()]).replace(sample)
    await until(lambda: has(1))
    assert (await client.get("/api/rows/2"))["row"]["failure"]["error"] == "RolloutTimeout"
    await client.get("/api/rows/3", status=404)


async def test_a_row_whose_file_is_gone_is_a_conflict_and_not_a_crash(client, sample):
    await client.get("/api/groups")
    sample.unlink()
    assert "No such file" in (await client.get("/api/rows/2", status=409))["error"]


async def test_a_row_that_is_not_whole_still_has_its_json(client, sample):
    line = sample.read_bytes().splitlines(keepends=True)[1]
    with sample.open("ab") as end:
        end.write(line.replace(b'"logprobs":[', b'"logprobs":["x",'))

    async def has_it():
        return (await client.get("/api/status"))["rows"] == 8

    await until(has_it)
    assert "line 9 is no record" in (await client.get("/api/rows/9", status=422))["error"]
    node = await client.get('/api/rows/9/raw?path=["trajectory","logprobs"]')
    assert node["entries"][0]["preview"] == "x"


async def test_a_file_of_no_evaluation_has_no_report(client):
    assert not (await client.get("/api/status"))["evaluation"]
    for path in ("/api/report", "/api/report/tasks"):
        said = await client.get(path, status=404)
        assert "there is no plan.json beside it" in said["error"]


async def test_an_evaluations_directory_has_its_report(tmp_path):
    plan = plan_of({"math": {"a": "sums"}}, 2)
    file = add_rows(tmp_path, plan, ("a", 0, 1.0), ("a", 1, 0.0))
    async with (
        open_viewer(file, ViewerOptions(poll_s=0.02)) as viewer,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, viewer.url)
        assert (await client.get("/api/status"))["evaluation"]
        (math,) = (await client.get("/api/report"))["benchmarks"]
        assert math["total"]["numbers"]["reward"]["mean"] == 0.5
        (task,) = (await client.get("/api/report/tasks?benchmark=math"))["tasks"]
        assert (task["task_id"], task["group"], task["mean"]) == ("a", 0, 0.5)
        said = await client.get("/api/report/tasks?sort=size", status=400)
        assert "tasks are sorted by plan, mean, failed" in said["error"]

import pytest
from omegaconf import OmegaConf

from gymrl.benchmark.planned_servers import planned_servers, restated
from gymrl.errors import RealServersError

POLICY = {
    "policy_base_url": "http://10.0.0.7/v1",
    "policy_api_key": "none",
    "policy_model_name": "mine",
}


def model(**block):
    return {"responses_api_models": {"some_model": {"entrypoint": "app.py", **block}}}


def again(read, written=None):
    """What is read when a run starts, with the policy of that run."""
    config = OmegaConf.create({**restated(read, written or {}), **POLICY})
    resolved = OmegaConf.to_container(config, resolve=True)
    return {name: value for name, value in resolved.items() if name not in POLICY}


def test_the_policy_of_a_run_takes_the_place_of_the_plans():
    read = {
        "policy_model": model(base_url="http://policy-base-url.gymrl.invalid/v1"),
        "judge": model(
            base_url="http://policy-base-url.gymrl.invalid/v1",
            api_key="gymrl-policy-api-key",
            model="gymrl-policy-model-name",
        ),
    }
    judge = model(base_url="http://10.0.0.7/v1", api_key="none", model="mine")
    assert again(read) == {"judge": judge}


@pytest.mark.parametrize(
    "text", ["write ${name} here", r"a \${name}", r"\\${a}\\", "$x {y}", "${", "$${a}"]
)
def test_texts_that_look_like_references_stay_as_they_are(text):
    assert again({"judge": model(prompt=text)}) == {"judge": model(prompt=text)}


def test_where_servers_listen_and_what_data_they_have_is_left_out():
    read = {
        "ours": model(host="127.0.0.1", datasets=[{"name": "x"}]),
        "theirs": model(host="10.0.0.1", port=80),
        "environment_server_routes": {"set": "ours"},
        "server_spinup_timeout_seconds": 4,
        "work_dir": "/somewhere",
        "uv_cache_dir": "/of/gym",
        "config_paths": ["a.yaml"],
    }
    written = {name: value for name, value in read.items() if name != "uv_cache_dir"}
    assert restated(read, written) == {
        "ours": model(),
        "theirs": model(host="10.0.0.1", port=80),
        "environment_server_routes": {"set": "ours"},
    }


def test_a_relay_is_left_out_unless_a_taskset_goes_to_it():
    relay = {"environment_servers": {"legacy_agent": {"agent_server": {"name": "ours"}}}}
    read = {"ours": model(), "relay": relay}
    assert restated(read, read) == {"ours": model()}
    read["environment_server_routes"] = {"set": "relay"}
    assert restated(read, read) == read


def test_a_key_of_the_environment_stays_there():
    written = {
        "judge": model(api_key="${judge_key}", other="${oc.env:OTHER_SECRET}"),
        "judge_key": "${judge_api_key}",
        "judge_api_key": "${oc.env:JUDGE_KEY,none}",
    }
    read = {"judge": model(api_key="sk-1", other="plain"), "judge_key": "sk-1"}
    read["judge_api_key"] = "sk-1"
    kept = restated(read, written)
    assert kept["judge"] == model(api_key="${oc.env:JUDGE_KEY,none}", other="plain")
    # Also under a name that does not say what it is.
    assert kept["judge_key"] == kept["judge_api_key"] == "${oc.env:JUDGE_KEY,none}"


@pytest.mark.parametrize("written", ["sk-1", "${judge_key}", "${nowhere}", "${round}"])
def test_a_key_that_is_written_out_is_refused_without_showing_it(written):
    files = {
        "judge": model(inner=[{"openai_api_key": written}]),
        "judge_key": "sk-1",
        "round": "${round}",
    }
    read = {"judge": model(inner=[{"openai_api_key": "sk-1"}])}
    with pytest.raises(RealServersError, match=r"openai_api_key holds a key.*oc\.env") as caught:
        restated(read, files)
    assert "sk-1" not in caught.value.message


def test_texts_that_stand_for_no_key_are_no_keys():
    read = {"judge": model(api_key="EMPTY", api_key_name="", eos_token="</s>")}
    assert restated(read, {}) == read


def test_servers_of_ours_need_no_gym():
    planned = planned_servers("chain_sum")
    assert planned.gym_version is None
    assert list(planned.servers) == ["chain_sum", "chain_sum_simple_agent"]

import pytest

from gymrl.config import GenerationConfig, VllmConfig
from gymrl.errors import ConfigError
from gymrl.generation.vllm_process import assigned_devices, engine_environment


@pytest.mark.parametrize(
    ("config", "visible", "devices"),
    [
        (VllmConfig(), None, "0"),
        (VllmConfig(rank=3), None, "3"),
        (VllmConfig(rank=1, tensor_parallel_size=2), None, "2,3"),
        (VllmConfig(rank=1, tensor_parallel_size=2), "4,5,6,7", "6,7"),
        (VllmConfig(rank=1), "GPU-aa, GPU-bb", "GPU-bb"),
        (VllmConfig(devices=(5,)), None, "5"),
        (VllmConfig(devices=(3, 0), tensor_parallel_size=2), "4,5,6,7", "7,4"),
    ],
)
def test_an_engine_takes_the_devices_of_its_rank_or_those_it_was_given(config, visible, devices):
    assert assigned_devices(config, visible) == devices


def test_ranks_side_by_side_never_share_a_device():
    taken = [
        assigned_devices(VllmConfig(rank=rank, tensor_parallel_size=2), "0,1,2,3,4,5,6,7")
        for rank in range(4)
    ]
    assert ",".join(taken) == "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("config", "setting"),
    [(VllmConfig(rank=2), "vllm.rank"), (VllmConfig(devices=(2,)), "vllm.devices")],
)
def test_devices_that_are_not_there_are_an_error(config, setting):
    with pytest.raises(ConfigError, match="shows 2; start fewer engines") as caught:
        assigned_devices(config, "0,1")
    assert caught.value.setting == setting


def test_on_a_cpu_the_environment_makes_the_engine_small_and_quick_to_start():
    variables = engine_environment(GenerationConfig(model="m"), on_cpu=True, environ={})
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "CUDA_VISIBLE_DEVICES" not in variables
    assert "OMP_NUM_THREADS" not in variables


def test_on_a_gpu_vllms_defaults_stay_and_the_devices_are_set():
    variables = engine_environment(GenerationConfig(model="m"), on_cpu=False, environ={})
    assert variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert not {"TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(variables)


def test_what_the_user_set_is_kept():
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG", "TORCHDYNAMO_DISABLE": "0"}
    variables = engine_environment(GenerationConfig(model="m"), on_cpu=True, environ=environ)
    assert not environ.keys() & variables.keys()


def test_the_number_of_threads_is_the_configurations():
    config = GenerationConfig(model="m", num_threads=3)
    assert engine_environment(config, on_cpu=True, environ={})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("device", "on_cpu", "said"),
    [
        ("cuda", True, r"runs on CPUs; install gymrl\[vllm\]"),
        ("cpu", False, r"runs on GPUs; install gymrl\[vllm-cpu\]"),
    ],
)
def test_a_device_that_the_installed_build_does_not_have_is_an_error(device, on_cpu, said):
    config = GenerationConfig(model="m", device=device)
    with pytest.raises(ConfigError, match=said):
        engine_environment(config, on_cpu=on_cpu, environ={})


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"rank": -1}, "vllm.rank"),
        ({"tensor_parallel_size": 0}, "vllm.tensor_parallel_size"),
        ({"devices": (1,), "tensor_parallel_size": 2}, "vllm.devices"),
        ({"kv_cache_bytes": 0}, "vllm.kv_cache_bytes"),
        ({"request_timeout_s": 0.0}, "vllm.request_timeout_s"),
        ({"probe_interval_s": 0.0}, "vllm.probe_interval_s"),
    ],
)
def test_settings_are_checked(settings, setting):
    with pytest.raises(ConfigError) as caught:
        VllmConfig(**settings)
    assert caught.value.setting == setting

"""What torch would do to a worker whose peer dies is switched off, whatever the environment says."""

from headway.stages.links.collective.nccl_settings import OLD_NAMES, SETTINGS, outlive_peers


def test_a_worker_outlives_its_peers_whatever_the_administrator_has_set() -> None:
    """Torch's watchdog and its monitor end no process, in either spelling of the setting; NCCL's own settings stay."""
    environment = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    outlive_peers(environment)
    assert environment == {**SETTINGS, "NCCL_SOCKET_IFNAME": "eth0"}
    assert environment["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert not environment.keys() & set(OLD_NAMES)

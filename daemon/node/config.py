"""The settings of one node: a file, the environment and flags, in rising priority, as one typed value."""

import difflib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from headway.daemon.base.addresses import NODE_NAME_RULE, is_node_name, read_ports, split_address
from headway.daemon.base.allowed_places import check_places
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.members import read_members
from headway.daemon.jobs.rules import MAX_TEXT, is_sha256
from headway.daemon.jobs.typed_toml import parse_toml, read_text
from headway.daemon.node.relays import read_relays
from headway.daemon.node.settings import FIELD_NAMES, UNNAMED_SITE, NodeConfig

ENVIRONMENT_PREFIX = "HEADWAY_"
CLIENT_CERTIFICATES = "HEADWAY_CERTS"
"""Clients' variable for their folder of certificates: it counts for a daemon without a certificates setting."""


NOT_NEGATIVE = (
    "num_devices",
    "num_spares",
    "store_quota_bytes",
    "quarantine_after",
    "stop_timeout_s",
    "ended_jobs_kept",
)
LISTS = ("etcd", "allowed_places", "allow_plugins")
"""Keys with several values, which the environment and flags separate by commas."""


def read_node_config(
    path: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> NodeConfig:
    """Return settings from a TOML file, the environment (os.environ if None) and flags; later ones override earlier
    ones.

    Only HEADWAY_CERTS has a lower priority than the file. A flag that is None was not given. Raises ConfigError, naming
    the file, variable or flag and the nearest valid name.

    """
    environment = os.environ if environment is None else environment
    settings: dict[str, tuple[str, object]] = {}
    if told := environment.get(CLIENT_CERTIFICATES):
        settings["certificates"] = (CLIENT_CERTIFICATES, told)
    if path is not None:
        settings |= {key: (str(path), value) for key, value in _from_file(path).items()}
    settings |= _from_environment(environment)
    settings |= {key: (_flag(key), value) for key, value in (flags or {}).items() if value is not None}
    for key, (where, _) in settings.items():
        if key not in FIELD_NAMES:
            raise ConfigError(f"unknown key {key!r}{_nearest(key)}", where)
    config = _convert(settings)
    return _checked(config, settings)


def advertised_host(config: NodeConfig) -> str:
    """Return the host that others dial: the setting, or the listening host, or, if that is a wildcard, the machine's
    name.
    """
    if config.advertise_host:
        return config.advertise_host.strip("[]")
    host, _ = listen_address(config)
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def listen_address(config: NodeConfig) -> tuple[str, int]:
    """Return host and port of `listen`. Raises ConfigError when it is not host:port."""
    return split_address(config.listen, "listen")


def check_worker_ports(config: NodeConfig, num_devices: int) -> None:
    """Raise ConfigError when `worker_ports` has fewer ports than the node has workers and spares."""
    num_needed = num_devices + config.num_spares
    if config.worker_ports and len(read_ports(config.worker_ports, "worker_ports")) < num_needed:
        what = f"{num_devices} workers and {config.num_spares} spares need {num_needed} ports"
        raise ConfigError(f"{config.worker_ports!r}: {what}", "worker_ports")


def _from_file(path: Path) -> dict[str, Any]:
    return parse_toml(read_text(path, "settings file"), str(path))


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    """Return the variables named after fields. Others belong to other programs, unless they look like a
    typing error.
    """
    settings: dict[str, tuple[str, object]] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key in FIELD_NAMES:
            settings[key] = (variable, tuple(text.split(",")) if key in LISTS else text)
        elif close := difflib.get_close_matches(key, FIELD_NAMES, n=1, cutoff=0.85):
            raise ConfigError(f"unknown variable; did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?", variable)
    return settings


def _convert(settings: Mapping[str, tuple[str, object]]) -> NodeConfig:
    for key, (where, value) in settings.items():
        try:
            msgspec.convert({key: value}, NodeConfig, strict=False, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{key} = {value!r}: {str(error).split(' - at')[0]}", where) from error
    values = {key: value for key, (_, value) in settings.items()}
    config = msgspec.convert(values, NodeConfig, strict=False, dec_hook=_decode_path)
    return config if config.name else replace(config, name=socket.gethostname())


def _checked(config: NodeConfig, settings: Mapping[str, tuple[str, object]]) -> NodeConfig:
    def refuse(key: str, what: str) -> ConfigError:
        value = getattr(config, key)
        told = repr(str(value) if isinstance(value, Path) else value)
        return ConfigError(f"{key} = {told}: {what}", settings[key][0] if key in settings else "")

    if not is_node_name(config.name):
        raise refuse("name", f"a node's name is {NODE_NAME_RULE}; give one with --name")
    if not config.site or len(config.site) > MAX_TEXT or not config.site.isprintable():
        raise refuse("site", f"a site's name is 1 to {MAX_TEXT} printable characters")
    if config.site_is_private and config.site == UNNAMED_SITE:
        raise refuse("site_is_private", "name the site with `site`, with the same name on all of its nodes")
    for told in config.allow_plugins:
        if told != "any" and not is_sha256(told):
            raise refuse(
                "allow_plugins", f"{told!r} is neither any nor the SHA-256 of a wheel, 64 digits of 0-9 and a-f"
            )
    if config.lease_ttl_s < 1:
        raise refuse("lease_ttl_s", "at least 1 second")
    if config.transfer_mbit_s != 0.0 and not 1.0 <= config.transfer_mbit_s < inf:
        raise refuse("transfer_mbit_s", "at least 1 Mbit/s, or 0 for no limit")
    for key in NOT_NEGATIVE:
        if getattr(config, key) < 0:
            raise refuse(key, "must not be negative")
    if config.cuda_reserve_gib is not None and not 0 <= config.cuda_reserve_gib < inf:
        raise refuse("cuda_reserve_gib", "at least 0 GiB")
    if config.card_sharers < 1:
        raise refuse("card_sharers", "at least 1, this daemon")
    if config.etcd_user and config.etcd_password_file is None:
        raise refuse("etcd_user", "needs etcd_password_file too")
    _, port = listen_address(config)
    if config.worker_ports and port in read_ports(config.worker_ports, "worker_ports"):
        raise refuse("worker_ports", f"has the daemon's own port {port}, which `listen` names")
    if config.one_port and config.worker_ports:
        raise refuse("worker_ports", "with one_port, workers have no ports of their own; leave one of the two out")
    if config.announce:
        if not config.one_port:
            raise refuse("announce", "needs one_port = true: a router maps one port, and workers have others")
        split_address(config.announce, "announce")
    if config.authority is not None and not config.one_port:
        what = "needs one_port = true (--one-port): new machines have no certificate, and only that port hears them"
        raise refuse("authority", what)
    if config.relay:
        if not config.one_port or config.announce:
            raise refuse("relay", "needs one_port = true and no announce: others reach this node there alone")
        read_relays(config.relay, "relay")
    if config.metrics_listen:
        split_address(config.metrics_listen, "metrics_listen")
    if config.preemption_server:
        split_address(config.preemption_server, "preemption_server")
    try:
        check_places(config.allowed_places)
    except ConfigError as error:
        raise refuse("allowed_places", str(error)) from error
    where = settings["etcd"][0] if "etcd" in settings else "etcd"
    return replace(config, etcd=read_members(config.etcd, where, has_certificates=True))


def _decode_path(_: type, value: object) -> Path:
    if isinstance(value, str):
        try:
            return Path(value).expanduser()
        except RuntimeError as error:
            raise msgspec.ValidationError(f"Expected a path, got `{value}`: {error} Set HOME") from error
    if isinstance(value, Path):
        return value
    raise msgspec.ValidationError(f"Expected a path, got `{type(value).__name__}`")


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, FIELD_NAMES, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

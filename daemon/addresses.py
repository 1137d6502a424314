"""host:port as text: how it is read and written. An IPv6 host stands in brackets there, and nowhere else."""

from headway.daemon.errors import ConfigError


def split_address(text: str, key: str) -> tuple[str, int]:
    """Host and port of a setting. Raises ConfigError, naming its key, when it is not host:port."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{text!r} is not host:port", key)
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """host:port, as gRPC takes it."""
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """The host as it stands before a colon."""
    return f"[{host}]" if ":" in host else host

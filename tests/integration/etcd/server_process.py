"""Starts an etcd, prints its pid and waits to be killed: `server_process.py BINARY DATA_DIR LOG_FILE CERTIFICATES`."""

import asyncio
import sys
from pathlib import Path

from headway.daemon.local.processes import EtcdServer, EtcdServerConfig


async def main(binary: str, data_dir: str, log_file: str, certificates: str) -> None:
    """Hold a server until killed."""
    config = EtcdServerConfig(
        binary=Path(binary), data_dir=Path(data_dir), log_file=Path(log_file), certificates=Path(certificates)
    )
    async with await EtcdServer.start(config) as server:
        sys.stdout.write(f"{server.pid}\n")
        sys.stdout.flush()
        await server.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

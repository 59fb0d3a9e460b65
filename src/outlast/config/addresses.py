"""Where the lighthouse is, and the job's secret: from the config or the environment."""

import os
from urllib.parse import urlsplit

from outlast.config.sections import FaultTolerance
from outlast.errors import ConfigError


def lighthouse_address(f: FaultTolerance) -> str:
    """Where the lighthouse is: the config's, the environment's, or the field's default.

    Raises:
        ConfigError: it isn't http://host:port.
    """
    address = f.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE") or "http://localhost:29510"
    host_and_port(address)
    return address


def job_token() -> str:
    """The job's secret, `OUTLAST_TOKEN`; empty where none is given."""
    return os.environ.get("OUTLAST_TOKEN", "")


def host_and_port(address: str) -> tuple[str, int]:
    """`http://host:port` -> its host and port.

    Raises:
        ConfigError: it isn't that.
    """
    try:
        parts = urlsplit(address)
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ConfigError(f"lighthouse address {address!r}: expected http://host:port")

"""Two machines: network namespaces joined by a cable, one group in each, folders of their own.

Nothing is shared but the network: each group's run folder is its own, so state comes back over the cable or not at all.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Event, Shell, end_all, eventually, reference, settings

from outlast import saves
from outlast.audit import audit, compare
from outlast.config import Config, FaultTolerance
from outlast.errors import ConfigError
from outlast.events import read_events
from outlast.rank import on_its_network
from outlast.seat import Seat

REPO = Path(__file__).parent.parent
STEPS = 40
"""With two ranks; another test needs that undisturbed run too."""
LIGHTHOUSE = (
    "torchft_lighthouse --bind 10.0.0.1:29510 --min_replicas 1 --heartbeat_timeout_ms 500 --quorum_tick_ms 100 "
    "--join_timeout_ms 10000"
)
GROUP = (
    "TRAIN_FILE=outlast.ft.train CONFIG_FILE=./configs/llama3_ft_debug.toml NGPU=2 MAX_RESTARTS=100 ./run_train.sh "
    "--parallelism.data_parallel_shard_degree=2 --fault_tolerance.group_size=2 --fault_tolerance.replica_id=0 "
    "--fault_tolerance.interface=eth1"
)
ENV = {"TORCHFT_LIGHTHOUSE": "http://10.0.0.1:29510", "OUTLAST_TOKEN": "..."}


def ip(*words: str) -> None:
    """`ip …`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Two namespaces and the cable between them."""

    def __init__(self) -> None:
        self.names = [f"outlast-{os.getpid()}-{side}" for side in "ab"]
        self.hosts = ["10.0.0.1", "10.0.0.2"]

    def lay(self) -> None:
        """Make them, or skip the test with the reason."""
        try:
            for name in self.names:
                ip("netns", "add", name)
            a, b = self.names
            ip("link", "add", "eth1", "netns", a, "type", "veth", "peer", "name", "eth1", "netns", b)
            for name, host in zip(self.names, self.hosts, strict=True):
                ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth1")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth1", "up")
        except FileNotFoundError:
            pytest.skip("no `ip` command (iproute2) here")
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces can't be made here: {e.stderr.decode().strip()}")

    def take_up(self) -> None:
        """Remove what was made."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def plug(self, state: str) -> None:
        """The cable: "up" or "down"."""
        ip("-n", self.names[1], "link", "set", "eth1", state)

    def listeners(self, side: int) -> dict[str, str]:
        """Address and port -> who listens there on a machine."""
        said = subprocess.run(
            ["ip", "netns", "exec", self.names[side], "ss", "-Hltnp"], check=True, capture_output=True, text=True
        )
        return {words[3]: words[-1] for words in map(str.split, said.stdout.splitlines())}


@pytest.fixture
def network() -> Iterator[Network]:
    """The two machines; nothing of them outlives the test."""
    made = Network()
    try:
        made.lay()
        yield made
    finally:
        end_all()
        made.take_up()


class Job:
    """A lighthouse on the first machine and a group of two ranks on each.

    Args:
        network: of the two.
        folder: of the test.
        others: settings.
    """

    def __init__(self, network: Network, folder: Path, **others: Any) -> None:
        self._network, self._folder, self._others = network, folder, others
        self._number = 0
        self._shell("lighthouse", 0, LIGHTHOUSE)
        self.groups = [self.start(side) for side in (0, 1)]

    def _shell(self, name: str, side: int, line: str) -> Shell:
        machine = self._folder / f"machine{side}"
        machine.mkdir(exist_ok=True)
        words = line.split()
        first = next(i for i, word in enumerate(words) if "=" not in word)
        words[first:first] = ["ip", "netns", "exec", self._network.names[side]]
        return Shell(self._folder / f"{name}.out", " ".join(words), machine, ENV)

    def start(self, side: int) -> Shell:
        """A group on a machine."""
        self._number += 1
        args = settings(job__run_dir="run", training__steps=STEPS, **self._others)
        line = GROUP.replace("./run_train.sh", str(REPO / "run_train.sh")).replace("replica_id=0", f"replica_id={side}")
        return self._shell(f"g{side}.{self._number}", side, f"{line} {' '.join(args)}")

    def run_dir(self, side: int) -> Path:
        """The run folder on a machine."""
        return self._folder / f"machine{side}" / "run"

    def events(self, side: int, *kinds: str) -> list[Event]:
        """Of the group on a machine, in order."""
        run_dir = self.run_dir(side)
        events = read_events(run_dir) if (run_dir / "events").exists() else []
        return sorted((e for e in events if e["kind"] in kinds), key=lambda e: e["t"])

    def step(self, side: int) -> int:
        """The highest step that a group committed."""
        return max((e["step"] for e in self.events(side, "commit")), default=0)

    def wait_step(self, side: int, step: int) -> None:
        """Wait until a group committed a step."""
        eventually(lambda: self.step(side) >= step, f"step {step} of g{side}; see {self._folder}")

    def same_bits(self) -> None:
        """Both groups end in order, each with the undisturbed run's bits on its own disk."""
        codes = [group.end() for group in self.groups]
        said = "".join(group.output() for group in self.groups)
        assert codes == [0, 0], said
        assert "Traceback" not in said
        expected = reference(2, training__steps=STEPS)
        verdict = audit([e for side in (0, 1) for e in read_events(self.run_dir(side))])
        compared = compare(verdict, expected)
        assert verdict.broken == () and compared.same, (verdict.broken, compared.difference)
        for side in (0, 1):
            done = saves.done_marker(self.run_dir(side))
            digests = {e["sha256"] for e in self.events(side, "digest") if e["step"] == STEPS}
            assert digests == {expected.final_digest}, f"machine {side}"
            assert done is None or done["digest"] == expected.final_digest


def test_the_document_shows_these_lines() -> None:
    text = (REPO / "docs" / "machines.md").read_text().replace(" \\\n", " ")
    shown = [" ".join(line.split()) for line in text.splitlines()]
    assert LIGHTHOUSE in shown and GROUP in shown
    for name, value in ENV.items():
        assert any(line.startswith(f"export {name}={value}") for line in shown)


def test_a_group_heals_from_another_machine(network: Network, tmp_path: Path) -> None:
    job = Job(network, tmp_path, training__unit_pause_ms=120)
    for side in (0, 1):
        job.wait_step(side, 3)
    for side in (0, 1):
        for address in network.listeners(side):
            assert address.rpartition(":")[0] in ("127.0.0.1", network.hosts[side]), network.listeners(side)
    os.kill(job.groups[1].pid, signal.SIGKILL)
    job.groups[1].end()
    died_at = job.step(1)
    job.groups[1] = job.start(1)
    eventually(lambda: [e for e in job.events(1, "heal") if e["step"] > died_at], "it heals")
    assert not saves.steps_saved(job.run_dir(1)), "no state on this disk to come back from"
    job.wait_step(1, died_at + 1)
    job.same_bits()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_cable_is_cut_for_a_while(network: Network, tmp_path: Path) -> None:
    """The side with the lighthouse goes on; the other waits, and comes back."""
    job = Job(network, tmp_path, training__unit_pause_ms=300)
    for side in (0, 1):
        job.wait_step(side, 3)
    network.plug("down")
    time.sleep(20)
    assert [group.popen.poll() for group in job.groups] == [None, None]
    there = [job.step(side) for side in (0, 1)]
    assert there[0] > there[1], "only the side that reaches the lighthouse goes on"
    network.plug("up")
    job.wait_step(1, there[0] + 1)
    job.same_bits()
    assert [e for e in job.events(1, "heal") if e["step"] > there[1]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"interface": "nope0"}, "interface = 'nope0' has no IPv4 address here; there are: lo (127.0.0.1)"),
        ({"interface": "lo", "host": "10.0.0.1"}, "host = '10.0.0.1', and fault_tolerance.interface = 'lo' has 127.0"),
        ({"host": "192.0.2.77"}, "host = '192.0.2.77' isn't an address of this machine"),
        ({"host": "no-such.invalid"}, "host = 'no-such.invalid' isn't an address of this machine"),
        ({"host": "0.0.0.0"}, "host = '0.0.0.0': expected one address"),
        ({"lighthouse": "http://192.0.2.77:29510"}, "the lighthouse at http://192.0.2.77:29510 is on another machine"),
    ],
)
def test_an_address_that_cannot_be_a_groups_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        on_its_network(Config(fault_tolerance=FaultTolerance(enable=True, **given)), Seat())
    assert says in str(refused.value)

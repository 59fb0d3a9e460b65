"""Every wait of a fault-tolerant job, derived from one setting."""

from dataclasses import dataclass

from outlast.config import FaultTolerance


@dataclass(frozen=True)
class Times:
    """Every wait, in seconds; all follow from `fault_tolerance.heartbeat_timeout_ms`."""

    heartbeat: float  # silence after which the lighthouse drops a member
    beat: float  # between heartbeats
    join: float  # the lighthouse waits this long for a live member that doesn't ask
    ask: float  # a quorum call; longer than `join`, or asking again would reset that clock
    connect: float  # meeting in a new process group
    exchange: float  # one piece of the sums, once all have arrived
    unit: float  # the least that a unit may take before the heartbeat stops
    first_unit: float  # the first one: nothing is known yet
    phase: float  # start, heal, digest, save
    lighthouse: float  # without a lighthouse, then give up
    lost: float  # a collective inside a group, then its other ranks count as lost

    @classmethod
    def of(cls, config: FaultTolerance) -> "Times":
        """The times that follow from a config."""
        beat = config.heartbeat_timeout_ms / 1000
        join = config.join_timeout_ms / 1000 if config.join_timeout_ms else 20 * beat
        exchange = config.process_group_timeout_ms / 1000 if config.process_group_timeout_ms else 20 * beat
        return cls(
            heartbeat=beat,
            beat=beat / 5,
            join=join,
            ask=join + 10 * beat,
            connect=4 * beat,
            exchange=exchange,
            unit=2 * beat,
            first_unit=240 * beat,
            phase=240 * beat,
            lighthouse=1200 * beat,
            lost=1200 * beat,
        )

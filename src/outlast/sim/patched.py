"""Holes of the protocol that the simulator found, closed here until they are closed there."""

from dataclasses import replace

from outlast.ft.protocol import Action, Answer, Compute, Connect, Participant, Protocol


class Patched(Protocol):
    """The protocol as it should be."""

    def answered(self, answer: Answer) -> Action:
        asks = max([p.data["asks"] for p in answer.participants])
        floors = max([p.data["floor"] for p in answer.participants])
        at = max([p.step for p in answer.participants])
        redo = at == 0 and floors == 1 and any(p.data["ran"] for p in answer.participants)
        changed = [
            Participant(
                p.name,
                p.step,
                p.address,
                p.store,
                {**p.data, "asks": asks} | ({"floor": 0} if redo else {}),
            )
            for p in answer.participants
        ]
        held = set(self.held)
        action = super().answered(replace(answer, participants=changed))
        if isinstance(action, Connect):
            self.held = held
        return action

    def _compute(self) -> Compute:
        if self.run is not None and self.run.drop:
            self.held.clear()
        return super()._compute()

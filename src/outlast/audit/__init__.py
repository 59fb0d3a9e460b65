"""`outlast audit`: check what a run promised, from its events alone.

`audit(events)` and `compare(a, b)` are pure; `audit_command` is the shell round them. Imports no torch.
"""

from outlast.audit.incidents import Incident
from outlast.audit.report import audit_command, incident_table, to_json
from outlast.audit.verdict import Audit, Comparison, Difference, Step, audit, compare

__all__ = [
    "Audit",
    "Comparison",
    "Difference",
    "Incident",
    "Step",
    "audit",
    "audit_command",
    "compare",
    "incident_table",
    "to_json",
]

"""The buffer as each role may use it, checked by mypy. Each class combines the kinds of calls that one role needs.
`Buffer` has all calls, so a `Buffer` can be passed wherever one of these classes is expected. Only the operator, who
has a `Buffer`, inserts finished groups, saves and restores.
"""

from rollq.buffer.calls.admission import Admission
from rollq.buffer.calls.archiving import Archiving
from rollq.buffer.calls.batches import Batches
from rollq.buffer.calls.coordination import Coordination
from rollq.buffer.calls.evaluations import Evaluations
from rollq.buffer.calls.group_lives import Living
from rollq.buffer.calls.inspection import Inspection
from rollq.buffer.calls.lending import Lending
from rollq.buffer.calls.payload_removal import Collecting
from rollq.buffer.calls.reporting import Reporting
from rollq.buffer.calls.training import Training
from rollq.buffer.query.pages import Paging


class ProducerBuffer(Batches, Admission, Collecting, Inspection):
    """Admits prompts, fills evaluations, sweeps, and sets a task's control."""


class CoordinatorBuffer(Coordination, Collecting, Inspection):
    """Runs batches as a whole, and sweeps while it waits."""


class WorkerBuffer(Lending):
    """Leases groups, puts results, and lends samples to other workers."""


class TrainerBuffer(Evaluations, Training, Living, Inspection):
    """Claims, commits and publishes, and evaluates."""


class ArchiverBuffer(Inspection, Archiving):
    """Reads groups that leave the buffer, and releases groups once they are in the archive."""


class MonitorBuffer(Inspection, Paging, Reporting):
    """Reads, and records the run state that was last reported."""

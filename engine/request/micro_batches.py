"""Which requests a pipeline's next step may hold: its stages compute different steps at the same time."""

from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.request import Request


class MicroBatches:
    """Up to `count` steps of different requests are under way. With 1 nothing is restricted.

    A request of a step under way is neither planned nor preempted: its next token is not known, and its rows are not
    sampled yet.
    """

    def __init__(self, count: int = 1):
        self.count = count
        self._under_way: set[Request] = set()

    def split(self, decodes: list[Request], prompts: list[Request]) -> tuple[list[Request], list[Request]]:
        """What the next step may hold of the running requests: of all decodes one share."""
        if self.count == 1:
            return decodes, prompts
        return self.free(decodes)[: -(-len(decodes) // self.count)], self.free(prompts)

    def free(self, requests: list[Request]) -> list[Request]:
        """Those that no step under way holds."""
        return [request for request in requests if request not in self._under_way] if self._under_way else requests

    def planned(self, plan: StepPlan) -> None:
        if self.count > 1:
            self._under_way.update(item.request for item in plan.scheduled)
            plan.needs_commit = False  # no later plan holds these requests before the commit

    def committed(self, plan: StepPlan) -> None:
        if self._under_way:
            self._under_way.difference_update(item.request for item in plan.scheduled)

    def present(self, running: list[Request], plan: StepPlan) -> list[Request]:
        """The running requests that the time of a step is booked to: not those that only other steps hold. Before
        `committed`."""
        if not self._under_way:
            return running
        planned = {item.request for item in plan.scheduled}
        return [request for request in running if request in planned or request not in self._under_way]

# SPDX-License-Identifier: Apache-2.0
"""The lists of a padded step, in the state at fixed addresses: sent only where they differ from the last step's."""

from torch import Tensor

from headrace.worker.request_state import STEP_LISTS, RequestState
from headrace.worker.upload import StepWords


class StepLists:
    """The host's half: what the lists in the state hold once all that was staged is carried out."""

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self._width = state.records.shape[0] + 1
        self._known: dict[str, list[int] | None] = {}
        self.forget()

    def stage(self, name: str, values: list[int], filler: int, words: StepWords) -> None:
        """Make a list `values`, then `filler` to its end."""
        if self._known[name] != values:
            self._known[name] = values
            words.write(self._state.list_starts[name], values + [filler] * (self._width - len(values)))

    def forget(self) -> None:
        """The lists are not what was staged last: an upload failed, or a graph was captured with others."""
        self._known = dict.fromkeys(STEP_LISTS)

    def view(self, name: str, length: int) -> Tensor:
        """The first entries of a list: int32 [length]."""
        return self._state.step_list(name, length)

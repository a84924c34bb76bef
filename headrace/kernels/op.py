# SPDX-License-Identifier: Apache-2.0
"""An op is its torch reference; faster implementations register against it and are chosen once, at build.

    @op(cases=norm_cases)
    def rms_norm(x, weight, eps): ...            # the reference

    rms_norm.impl("triton", on_cuda, "headrace.kernels.norm_triton:rms_norm")

    self.norm = rms_norm.choose("cuda")          # a plain function, bound when a layer is built

Under `deterministic` a row's result must not depend on the rows beside it, nor on how many there are: implementations
that do not hold to that are passed over, and some exist for it alone.

An implementation is named by a "module:attr" string and imported when it is first chosen, so a reference needs no
more than torch.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

OPS: dict[str, "Op"] = {}

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One call to test and to time: `args` are made anew for each use, because an op may write into them."""

    name: str
    args: tuple[Any, ...]
    bytes_moved: int = 0
    """Bytes a perfect implementation reads and writes; 0 where nobody times it."""


Use = Literal["always", "fast", "deterministic"]
"""When an implementation may be chosen: `fast` ones never under `deterministic`, `deterministic` ones only then."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One registered implementation."""

    supports: Callable[[str], bool]
    function: Function | str
    use: Use


Cases = Callable[[torch.dtype, str], Iterator[Case]]
"""(dtype, device) -> the op's cases on that device."""


def bind(target: str) -> Any:
    """The object a "module:attr" string names."""
    module, _, attr = target.partition(":")
    return vars(importlib.import_module(module))[attr]


class Op:
    """A reference function, its test cases and tolerance, and the implementations registered against it."""

    def __init__(self, reference: Function, cases: Cases | None, rtol: float, atol: float) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.cases = cases
        self.rtol = rtol
        self.atol = atol
        self.impls: dict[str, Implementation] = {}
        self.__doc__ = reference.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the reference."""
        return self.reference(*args, **kwargs)

    def impl(
        self, name: str, supports: Callable[[str], bool], target: str | None = None, use: Use = "always"
    ) -> Callable[[Function], Function]:
        """Register an implementation; `supports(device_type)` says where it runs. A later one is preferred.

        target: "module:attr", imported when first chosen; without it, use the result as a decorator.
        """

        def register(fn: Function) -> Function:
            self.impls[name] = Implementation(supports, fn, use)
            return fn

        if target is not None:
            self.impls[name] = Implementation(supports, target, use)
        return register

    def implementation(self, name: str) -> Function:
        """A registered implementation by name."""
        found = self.impls[name].function
        fn: Function = bind(found) if isinstance(found, str) else found
        return fn

    def choose(self, device_type: str, deterministic: bool = False) -> Function:
        """The preferred implementation for a device type (`cpu`, `cuda`); the reference where none is registered."""
        passed_over = "fast" if deterministic else "deterministic"
        for name, one in reversed(self.impls.items()):
            if one.use != passed_over and one.supports(device_type):
                return self.implementation(name)
        return self.reference

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """(rtol, atol) for results in a dtype: the op's own, widened by four roundings of a 16-bit result."""
        slack = 0.0 if dtype in (torch.float32, torch.float64) else 4 * torch.finfo(dtype).eps / 2
        return self.rtol + slack, self.atol + slack / 2


def op(cases: Cases | None = None, rtol: float = 1e-5, atol: float = 1e-5) -> Callable[[Function], Op]:
    """Make an `Op` of a reference function and list it in `OPS`. Without implementations it needs no cases."""

    def wrap(reference: Function) -> Op:
        made = Op(reference, cases, rtol, atol)
        OPS[made.name] = made
        return made

    return wrap


def on_cuda(device_type: str) -> bool:
    """For `Op.impl`: wherever there is a GPU, and Triton for it."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def on_cpu(device_type: str) -> bool:
    """For `Op.impl`: the processor."""
    return device_type == "cpu"

"""The CUDA driver through cuda.bindings, imported when first needed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .compile import nvrtc_version
from .error import FlashSkipError

# Driver results that mean "this image does not suit this driver or device".
_UNSUITABLE_IMAGE = {200, 209, 218, 222}
_TOO_OLD = 35


class DriverError(FlashSkipError):
    """A call of the CUDA driver failed. `code` is its CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def blames_image(self) -> bool:
        """Whether another cubin could help."""
        return self.code in _UNSUITABLE_IMAGE


@lru_cache
def driver() -> Any:
    """Return the module ``cuda.bindings.driver``, initialised.

    Raises
    ------
    DriverError
        There is no driver, or none that suits CUDA 13.
    """
    try:
        from cuda.bindings import driver as module

        (error,) = module.cuInit(0)
    except Exception as cause:  # the loader's own errors differ between versions of cuda-bindings
        raise DriverError(
            f"the CUDA driver could not be loaded ({cause}); kernels need an NVIDIA driver of "
            "CUDA 13 (580 or newer) and cuda-python 13",
            -1,
        ) from cause
    if error != module.CUresult.CUDA_SUCCESS:
        raise DriverError(_describe(module, error, "cuInit"), int(error))
    return module


def call(doing: str, name: str, *arguments: Any) -> Any:
    """Call a driver function; return what it gives besides its error, which raises.

    `doing` is the clause in the message: what was attempted.
    """
    module = driver()
    error, *values = getattr(module, name)(*arguments)
    if error != module.CUresult.CUDA_SUCCESS:
        raise failure(error, f"{name}, {doing}")
    return values[0] if len(values) == 1 else values


def failure(error: Any, doing: str) -> DriverError:
    """Return the exception for a result other than success."""
    return DriverError(_describe(driver(), error, doing), int(error))


def _describe(module: Any, error: Any, doing: str) -> str:
    text = f"CUDA driver error {int(error)}"
    for function in (module.cuGetErrorName, module.cuGetErrorString):
        _, name = function(error)
        if name:
            text += f" {name.decode()}"
    if int(error) == _TOO_OLD:
        text += "; the driver is older than CUDA 13: update it to 580 or newer"
    if int(error) in _UNSUITABLE_IMAGE:
        text += (
            f"; the driver supports CUDA {_driver_version(module)}, and NVRTC {nvrtc_version()} is "
            "installed: update the driver, or install the nvidia-cuda-nvrtc of its CUDA version"
        )
    return f"{text} ({doing})"


def _driver_version(module: Any) -> str:
    _, version = module.cuDriverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"

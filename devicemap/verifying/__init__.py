"""`DeviceMap.verify`: the same rows in several ways, and what their differences mean."""

from devicemap.verifying.checking import verify_rows
from devicemap.verifying.findings import Verification

__all__ = ["Verification", "verify_rows"]

"""`DeviceMap.verify`: the same rows in several ways, and what their differences mean."""

from devicemap.tell.verify.findings import Verification
from devicemap.tell.verify.ways import verify_rows

__all__ = ["Verification", "verify_rows"]

"""Simulated accelerators: see what several devices do on a machine that has none. What it models is in README.md.

simulator = load()
simulator.configure("CPU:1", speed=0.25, memory_rows=64)
with tf.device("CPU:1"):
    results = simulator.work(rows, seconds)  # 2 * rows + 1, after four times the sum of seconds
simulator.usage("CPU:1").rows
"""

from .building import Unavailable
from .simulation import Call, Simulator, Usage, load

__all__ = ["Call", "Simulator", "Unavailable", "Usage", "load"]

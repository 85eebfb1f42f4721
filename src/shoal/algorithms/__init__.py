"""Decentralized algorithms, each written once, as its equation.

An :class:`Algorithm` is a frozen dataclass with ``init`` and ``step``. It runs stacked, on thousands of simulated
agents (:class:`shoal.sim.StackedFleet`), and on real ones (:func:`run`): threads, processes, a cluster.
"""

from .algorithm import Algorithm as Algorithm
from .algorithm import Gradient as Gradient
from .catalog import CATALOG as CATALOG
from .catalog import Entry as Entry
from .catalog import register as register
from .exchange import Exchange as Exchange
from .exchange import run as run
from .gradient_descent import GradientDescent as GradientDescent
from .gradients import own as own
from .mix import Mix as Mix
from .needs import Need as Need
from .needs import check as check
from .run import Run as Run
from .tracking import GradientTracking as GradientTracking

"""Decentralized algorithms, each written once, as its equation.

An :class:`Algorithm` is a frozen dataclass with ``init`` and ``step``. It runs stacked, on thousands of simulated
agents (:class:`shoal.sim.StackedFleet`), and on real ones (:func:`run`): threads, processes, a cluster.
"""

from .._lazy_import import public_names as _public_names
from .algorithm import Algorithm as Algorithm
from .algorithm import Gradient as Gradient
from .catalog import CATALOG as CATALOG
from .catalog import Entry as Entry
from .catalog import register as register
from .compressed import BEER as BEER
from .compressed import CensoredGradientDescent as CensoredGradientDescent
from .compressed import ChocoSGD as ChocoSGD
from .compressed import DeepSqueeze as DeepSqueeze
from .compressed import LowPrecision as LowPrecision
from .directed import SGP as SGP
from .directed import PushDIGing as PushDIGing
from .directed import PushPull as PushPull
from .directed import PushSum as PushSum
from .exact import EXTRA as EXTRA
from .exact import NIDS as NIDS
from .exact import ExactDiffusion as ExactDiffusion
from .exchange import Exchange as Exchange
from .exchange import run as run
from .gradient_descent import DualAveraging as DualAveraging
from .gradient_descent import GradientDescent as GradientDescent
from .gradient_descent import GradientTracking as GradientTracking
from .gradient_descent import ParallelGradientDescent as ParallelGradientDescent
from .local_steps import KGT as KGT
from .local_steps import LED as LED
from .local_steps import GossipPGA as GossipPGA
from .local_steps import LocalSteps as LocalSteps
from .matrices import DeMuon as DeMuon
from .matrices import PowerGossip as PowerGossip
from .mix import Mix as Mix
from .momentum import AccumAdam as AccumAdam
from .momentum import AveragedMomentum as AveragedMomentum
from .momentum import DecentLaM as DecentLaM
from .momentum import DecentralizedSVRG as DecentralizedSVRG
from .momentum import Momentum as Momentum
from .momentum import MomentumTracking as MomentumTracking
from .momentum import QuasiGlobalMomentum as QuasiGlobalMomentum
from .needs import Need as Need
from .needs import check as check
from .outer_optimizers import EASGD as EASGD
from .outer_optimizers import DiLoCo as DiLoCo
from .outer_optimizers import GASLoC as GASLoC
from .outer_optimizers import NoLoCo as NoLoCo
from .outer_optimizers import SlowMo as SlowMo
from .per_link import DecentralizedADMM as DecentralizedADMM
from .per_link import RelaySum as RelaySum
from .runs.gradients import own as own
from .runs.run import Run as Run
from .stability.growth import safe_lr as safe_lr
from .wrappers import OfMachines as OfMachines
from .wrappers import RobustMixing as RobustMixing

__all__ = _public_names(globals())

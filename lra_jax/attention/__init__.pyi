from lra_jax.attention.flow.flow import *
from lra_jax.attention.gated_units.flash import *
from lra_jax.attention.gated_units.gau import *
from lra_jax.attention.linear.cosformer import *
from lra_jax.attention.linear.lightning import *
from lra_jax.attention.linear.linear import *
from lra_jax.attention.linear.norm import *
from lra_jax.attention.linear.performer import *
from lra_jax.attention.linear.retention import *
from lra_jax.attention.low_rank.fnet import *
from lra_jax.attention.low_rank.linformer import *
from lra_jax.attention.low_rank.luna import *
from lra_jax.attention.low_rank.nystrom import *
from lra_jax.attention.recurrent.delta import *
from lra_jax.attention.recurrent.gated_delta import *
from lra_jax.attention.recurrent.gla import *
from lra_jax.attention.recurrent.hgrn import *
from lra_jax.attention.registry import MECHANISMS as MECHANISMS
from lra_jax.attention.registry import Gate as Gate
from lra_jax.attention.registry import Mechanism as Mechanism
from lra_jax.attention.registry import accepted_keywords as accepted_keywords
from lra_jax.attention.registry import as_causal as as_causal
from lra_jax.attention.registry import names as names
from lra_jax.attention.registry import resolve as resolve
from lra_jax.attention.softmax.bigbird import *
from lra_jax.attention.softmax.local import *
from lra_jax.attention.softmax.longformer import *
from lra_jax.attention.softmax.reformer import *
from lra_jax.attention.softmax.sinkhorn import *
from lra_jax.attention.softmax.softmax import *
from lra_jax.attention.softmax.sparse import *
from lra_jax.attention.softmax.synthesizer import *

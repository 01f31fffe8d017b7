"""The two levels of exactness: what a second computation of a sample promises.

`bits`: a sample's tokens are a function of weights, prompt, sampling parameters and sample key; a second computation
has the same ones. `law`: each token is drawn from the distribution that the engine's fastest kernels compute, with the
sample's keyed noise; a second computation may part from the first where two candidates are close. Tokens that were
handed out never change at either level.
"""

from typing import Literal

Exactness = Literal["law", "bits"]

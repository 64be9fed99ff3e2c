"""The method of RLHF: configuration, data, algorithms, models and the driver loop. Knows neither Ray nor vLLM."""

import logging

# It warns, on CPUs that compute in bfloat16, that a kernel is missing which nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"

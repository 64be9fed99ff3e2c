"""The method of RLHF: configuration, data, algorithms, models and the driver loop. Knows neither Ray nor vLLM."""

__version__ = "0.1.0"

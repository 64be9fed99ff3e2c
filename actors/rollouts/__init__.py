"""The elastic pool of rollout workers: ``pool`` is what the driver sees.

``scheduler`` and ``autoscale`` are the rules. ``engine`` is what a worker asks of an inference engine, ``engine_loop``
drives one; none of these import Ray. Only modules named ``vllm_*`` know vLLM.
"""

"""The elastic pool of rollout workers: ``pool`` is what the driver sees.

``scheduler`` and ``autoscale`` are the rules and import no Ray; only modules named ``vllm_*`` know vLLM.
"""

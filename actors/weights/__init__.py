"""How weights travel from the learner to rollout workers, and how both know that they arrived.

``publish`` is the driver's side, ``sender`` the learner's; ``vllm_receiver`` runs inside vLLM's processes, and
``channel`` lies between the two.
"""

"""How weights travel from the learner to rollout workers, and how both sides know that they arrived.

``publish`` is the protocol and ``transports`` the driver's part in it; ``sender`` is the learner's end, and
``vllm_receiver`` runs inside vLLM's processes. ``routes`` lists the ways between the two: ``broadcast`` and ``share``
over a ``channel``, and the ``object_store``.
"""

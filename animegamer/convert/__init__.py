"""The authors' published weights to our layout and back, and to files that stock libraries read.

``checkpoint`` is the whole of it, ``decoder``, ``mllm`` and ``autoencoder`` hold one explicit key
table each, ``stock`` what other libraries load without our code.
"""

import os

# Two processes share two cores on a small machine; torch must not spin on both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests use what packages ship or what they make; nothing is fetched from a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

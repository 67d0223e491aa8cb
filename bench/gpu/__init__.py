"""What is proved of the CUDA path without a GPU, and what runs first on one."""

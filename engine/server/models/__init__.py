"""Several models behind one front: which are loaded, which sleep, and who waits for one."""

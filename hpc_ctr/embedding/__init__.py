"""Tables, working sets and the device table. No MPI."""

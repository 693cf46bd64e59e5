"""The MPI and Horovod session, and what travels between ranks."""

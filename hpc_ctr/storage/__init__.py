"""Cold rows in HDF5 segments on SSD, warm rows in host memory."""

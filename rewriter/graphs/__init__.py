"""From a schedule to forward and backward fx graphs of eager's ops."""

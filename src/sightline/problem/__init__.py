"""What is asked, the checked arguments of one call, and what a kernel answers."""

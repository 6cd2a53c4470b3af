"""What the commands of this folder share: what is asked, of whom, in which order, and what is made of the figures."""

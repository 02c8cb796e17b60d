"""The command `dms-data`: makes token files from text and checks them."""

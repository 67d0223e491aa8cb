"""What can be concluded from the evidence that people hold: certain, likely, unknowable, and the one next command."""

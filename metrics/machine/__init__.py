"""The computer that was measured on."""

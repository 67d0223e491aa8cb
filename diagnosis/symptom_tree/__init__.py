"""From a complaint in a user's words over lifecycles and objects to the measurement to make next."""

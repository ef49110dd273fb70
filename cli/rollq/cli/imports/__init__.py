"""Files of finished samples, as `rollq import` reads them."""

"""The promises of docs/explain, each as a test written from the contract alone."""

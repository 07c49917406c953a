"""Benchmarks of SGLang: real servers, with kvxfer's back ends beside SGLang's own."""

from benchmark.accuracy.retrieval import main

if __name__ == "__main__":
    raise SystemExit(main())

from benchmark.serving.throughput import main

if __name__ == "__main__":
    raise SystemExit(main())

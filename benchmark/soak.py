from benchmark.serving.soak import main

if __name__ == "__main__":
    raise SystemExit(main())

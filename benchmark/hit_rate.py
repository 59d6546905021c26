from benchmark.serving.hit_rate import main

if __name__ == "__main__":
    raise SystemExit(main())

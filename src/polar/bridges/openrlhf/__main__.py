from polar.bridges.openrlhf.trainer import main

main()

from recipes.launch import main

main()

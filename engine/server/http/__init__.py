"""HTTP below the routes: connections and their deadlines, heads, bodies, and what a web page may do."""

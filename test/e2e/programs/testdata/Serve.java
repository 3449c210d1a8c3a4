import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

/** Answers every HTTP request at the address and port that it is given. Built with: javac --release 11 Serve.java */
public final class Serve {
    public static void main(String[] args) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress(args[0], Integer.parseInt(args[1])), 0);
        byte[] answer = "here\n".getBytes("UTF-8");
        server.createContext("/", exchange -> {
            exchange.sendResponseHeaders(200, answer.length);
            exchange.getResponseBody().write(answer);
            exchange.close();
        });
        server.start();
    }
}
